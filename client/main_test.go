package client_test

import (
	"testing"

	"go.uber.org/goleak"
)

// No test may leave a goroutine: what a Client starts ends with it.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
