"""Operations of training runs, and what goes into a batch."""
