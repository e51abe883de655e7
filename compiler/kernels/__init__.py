"""Kernel templates of the CPU backend, one file a kind, and the toolchain that builds their C sources."""
