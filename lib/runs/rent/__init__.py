"""Machines to rent: by SSH, by Slurm, by Modal."""
