"""What the chapters use and nobody grades: data, plots, ranks, devices, weights."""
