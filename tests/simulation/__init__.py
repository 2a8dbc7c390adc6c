"""Lists of operations and faults over a real database, and processes that are really killed."""
