"""Programs that measure what the chapters report, and write the results to chapters/measurements/."""
