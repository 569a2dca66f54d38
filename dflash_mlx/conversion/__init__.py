"""What `dflash_mlx.convert` is made of: the recipe, and the way of a target through mlx_lm."""
