"""Token tries on the GPU: `genlm.get_trie("cuda")`.

`plan` says what to combine with what, `kernels` and `launches` do it in Triton,
`torch_path` in torch, and `trie` is the class that chooses between them.
"""
