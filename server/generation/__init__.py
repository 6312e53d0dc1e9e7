"""Chat and completions: from body to engine request, from deltas to answer or stream."""
