"""Who may be continued from: records of requests, leases, and the budget that pays for them."""
