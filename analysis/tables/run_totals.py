TOTALS_FILE = "totals.json"
