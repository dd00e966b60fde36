"""Build-time only: the CuTe DSL sources of the kernels. Nothing in ``megamoe_aot`` imports this package."""
