"""What tenants keep here and look after: catalogues, and records to continue from."""
