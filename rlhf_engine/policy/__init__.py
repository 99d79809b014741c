"""Many policies on one frozen base: their life, joint passes, and the thread that draws for all of them."""
