"""Who computes what in each step: admission, turns between tenants, plans, and what their results change."""
