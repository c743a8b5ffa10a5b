"""A pretended CUDA device: the laws of the CUDA path, run where there is no GPU.

    scripts/test_cuda                                      # all of them
    python -m pytest -p tests.pretended.plugin -m gpu ...  # some

`device.cpp` (with `memory.h`, `streams.h` and `workspaces.h`) is the device as torch's C++ side
sees it, `build` its compiler, `install` the names of `torch.cuda`, `kernels` what stands for the
Triton kernels, `process_groups` what stands for NCCL, `plugin` what pytest loads.

Pretends: memory that the host may not read, poisoned when fresh and when freed, and given out again
in stream order as torch's allocator does; streams, events, copies and launches that run beside the
host, each stream in a thread; host registration; refusals of mixed devices; autograd's thread;
cuBLAS's workspaces; the tables of Triton's launches; attention's fused kernels, chosen as on a GPU
of compute capability 9.0: cuDNN's first; another process that takes memory of the device.
Cannot show: speed, Triton's programs, NCCL, CUDA graphs. A law that passes here has still to pass
on a GPU.
"""
