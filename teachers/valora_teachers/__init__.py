"""Small models whose knowledge is fused into the LMM."""
