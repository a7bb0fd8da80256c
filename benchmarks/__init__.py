"""Speed beside peers doing the same work in the same run. Figures, never judgements: no test asserts a time."""
