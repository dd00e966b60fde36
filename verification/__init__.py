"""Independent opinions on the shipped artifacts: what ptxas kept, what other people's tools say of the same PTX.

Nothing here is needed to build, load or run a kernel. `census` and `disassembly` need the packages of the extra ``build``,
the rest the development-only packages of the extra ``verify``.
"""
