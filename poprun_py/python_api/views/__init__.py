"""``str`` and HTML (for notebooks) of configurations, plans, results and views of a job.

No launch imports this package: values import it when they are first shown. No module here prints.
"""
