"""The container suite: `pytest -m docker`.

`runs` says whose containers these are and takes them away, whatever became of the test run;
`harness` starts, asks and ends one. The images are those of ci/images.sh, built here when needed.
"""
