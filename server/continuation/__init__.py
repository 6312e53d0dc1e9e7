"""Parents, leases, and what an answer tells of them."""
