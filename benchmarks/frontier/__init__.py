"""The frontier: how much of DiLoCo's quality each method keeps for how many bytes. `make frontier` runs the study."""
