"""Ground under every op: choice of a backend, native and GPU code, checks, random numbers, costs."""
