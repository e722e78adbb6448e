"""What the tests share: a pool of rank processes, references to compare with, comparisons that explain themselves."""
