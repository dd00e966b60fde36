"""From a spec to verified bytes: compile, read the cubin and the PTX back, check, write, lock.

Nothing here decides what a kernel does; :mod:`kernels.build.compile` is the only file whose text can change its bytes.
"""
