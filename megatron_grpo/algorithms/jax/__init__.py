"""The algorithms on JAX arrays ``[B, S]``: pure functions, traceable by ``jax.jit`` with the configuration static."""
