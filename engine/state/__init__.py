"""The ground floor: sequences, groups, accounts, records, steps. Nothing here decides."""
