module aenv-test-guest

go 1.21
