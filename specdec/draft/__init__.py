"""Who can guess: each module is one kind of scorer, see `specdec.drafter`."""
