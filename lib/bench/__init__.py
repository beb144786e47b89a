"""Programs that measure what the chapters report, and write it to chapters/measurements/."""
