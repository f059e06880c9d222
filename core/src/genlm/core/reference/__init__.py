"""The reference engine: a byte n-gram model with exact probabilities in closed form.

It is for teaching, and an oracle in tests. The plugin module loads without numpy or torch.
"""
