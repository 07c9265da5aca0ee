"""Groups of trainers that come and go: how they meet, and how they add up gradients in a fixed order."""
