"""Contract suite: every optimizer class against what torch and its frameworks demand."""
