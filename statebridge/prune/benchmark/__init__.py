"""Does a pruned world still know what stood there? Tasks with ground truth, scores, and arms to compare."""
