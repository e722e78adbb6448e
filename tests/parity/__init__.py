"""The parity ring: 1 to 4 gloo ranks on one host come to the weights that plain PyTorch comes to, bit for bit.

It cannot see CUDA streams, NCCL, or anything that only hurts at the speed of real links.
"""
