"""Ground under every op: choice of a backend, native and GPU code, checks, random numbers, tuned settings, costs."""
