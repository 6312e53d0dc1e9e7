"""`bequest cluster`: replicas placed by Ray, requests routed by HAProxy. docs/scale.md."""
