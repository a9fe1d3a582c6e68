package apiserver_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"dsec/aether"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestTLS(t *testing.T) {
	t.Parallel()
	borrowed := httptest.NewUnstartedServer(nil) // for its certificate
	borrowed.StartTLS()
	cert := borrowed.TLS.Certificates[0]
	trust := borrowed.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	borrowed.Close()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) {
		c.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	})
	sb := w.create(hollow)

	conn, err := tls.Dial("tcp", w.ctl.Addr().String(), &tls.Config{RootCAs: trust, ServerName: "example.com"})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET /v1/aether HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: aether/1\r\n\r\n", rootToken)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(res, err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if out, err := echo(t.Context(), c, sb.ID, "secret"); err != nil || out != "secret" {
		t.Error(out, err)
	}
}
