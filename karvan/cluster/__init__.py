"""The roles of a job that is more than trainers, and what they hold; one file for each idea."""
