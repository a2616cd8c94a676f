"""The wheels that Kaggle's image may lack, taken for its Pythons."""
