"""The operators in plain PyTorch: on any device, in fp64 too, under the whole graph contract.

They serve CPU tensors and are the oracle of the kernels; ``graphsafe_kernels.backend`` chooses between the two.
"""
