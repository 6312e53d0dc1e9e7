"""How much of a step is whose, and how long steps take: the numbers behind the scheduler's decisions."""
