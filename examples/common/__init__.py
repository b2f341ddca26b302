"""What several examples need beside their subject: data to train on, one-line errors, figures.

A program of ``examples/NAME/`` finds these modules after
``sys.path.insert(0, str(Path(__file__).resolve().parents[1]))``.
"""
