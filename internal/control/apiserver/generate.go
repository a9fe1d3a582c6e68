package apiserver

//go:generate go test -run TestOpenAPI . -update
