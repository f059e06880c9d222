"""MLX models as a genlm engine; see `genlm_mlx.engine`."""
