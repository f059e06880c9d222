"""Token tries on the GPU: `genlm.get_trie("cuda")`.

`plan` computes the index arrays of a reduction. `kernels` and `triton_path` run it in Triton,
`torch_path` in torch operations. `trie` has the class, which selects one of them.
"""
