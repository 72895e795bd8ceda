"""One file per question of the paper. A study computes and returns plain results: no printing, drawing or writing."""
