"""The `cuda` backend: trivium_torch with Triton kernels, quantised products and CUDA graphs."""
