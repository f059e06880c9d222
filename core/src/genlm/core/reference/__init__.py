"""The reference engine: a byte n-gram model with exact probabilities in closed form.

For teaching and as an oracle in tests. The plugin module loads without numpy or torch.
"""
