"""The loader of a job whose records are leased: reads the tasks that trainers have leased."""
