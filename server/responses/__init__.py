"""The Responses API: bodies, items, events, and the store of what can be continued."""
