package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

const (
	maxBody    = 1 << 20
	apiVersion = "1.0.0" // of the API, not of the server

	description = `Management of DSec: sandboxes, images, nodes, tokens and events. ` +
		`What happens inside a sandbox (processes, sessions, files, ports) goes over Aether: GET /v1/aether upgrades to it.

Every request but health and this document carries "Authorization: Bearer TOKEN". Every failure is a Problem: ` +
		`a stable code, what failed in which phase, whether a retry can help (retryable) and whether the platform is to blame (is_infra). ` +
		`Every answer has an X-Request-Id, the client's own if it sent one. Unknown fields and query parameters are errors.

Answers of type application/x-ndjson are one JSON document per line, sent as it becomes known.`
)

// imageMux lets image names hold slashes, which OpenAPI's path templates cannot say.
type imageMux struct{ *http.ServeMux }

// HandleFunc implements humago.Mux.
func (m imageMux) HandleFunc(pattern string, h func(http.ResponseWriter, *http.Request)) {
	m.ServeMux.HandleFunc(strings.Replace(pattern, "/v1/images/{name}", "/v1/images/{name...}", 1), h)
}

func newAPI(mux *http.ServeMux) huma.API {
	c := huma.DefaultConfig("DSec", apiVersion)
	c.Info.Description = description
	c.CreateHooks = nil // no $schema links in answers
	c.DocsPath, c.SchemasPath, c.OpenAPIPath = "", "", "/openapi"
	c.RejectUnknownQueryParameters = true
	c.Transformers = []huma.Transformer{transform}
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"bearer": {Type: "http", Scheme: "bearer", Description: "A token of POST /v1/tokens, or the root token."},
	}
	c.Tags = []*huma.Tag{
		{Name: "sandboxes", Description: "Create, find and remove sandboxes."},
		{Name: "images", Description: "The catalogue of images."},
		{Name: "snapshots", Description: "Images that were made of sandboxes."},
		{Name: "image store", Description: "What images take, in the object store and on nodes."},
		{Name: "nodes", Description: "Edges and their load."},
		{Name: "tokens", Description: "Credentials."},
		{Name: "data plane", Description: "Operations inside sandboxes."},
		{Name: "server", Description: "The server itself."},
	}
	return humago.New(imageMux{mux}, c)
}

// op describes one operation.
type op struct {
	id, method, path string
	tag              string
	summary, text    string
	right            v1.Right // empty: open to all
	status           int      // of success; 0: 200
	errors           []errs.Code
	line             any // a zero value of one line, where the answer is a stream of lines
	body             int64
}

// common are the errors that any operation with a token can give.
var common = []errs.Code{errs.BadRequest, errs.InternalError}

func (s *Server) operation(o op) huma.Operation {
	h := huma.Operation{
		OperationID: o.id, Method: o.method, Path: o.path, Tags: []string{o.tag}, Summary: o.summary, Description: o.text,
		DefaultStatus: o.status, MaxBodyBytes: maxBody, BodyReadTimeout: s.cfg.BodyTimeout, Responses: map[string]*huma.Response{},
	}
	codes := append(slices.Clone(common), o.errors...)
	if o.right != "" {
		h.Metadata = map[string]any{metaRight: o.right}
		h.Security = []map[string][]string{{"bearer": {}}}
		h.Description += fmt.Sprintf("\n\nNeeds the right `%s`.", o.right)
		codes = append(codes, errs.BadToken, errs.MissingRight)
	}
	if o.method == http.MethodPost && o.body == 0 {
		codes = append(codes, errs.BodyTooLarge, errs.DeadlineExceeded)
	}
	s.problems(&h, codes)
	if o.line != nil {
		h.Responses["200"] = &huma.Response{
			Description: "Lines, each a JSON document.",
			Content:     map[string]*huma.MediaType{"application/x-ndjson": {Schema: s.schema(o.line)}},
		}
	}
	return h
}

func (s *Server) schema(v any) *huma.Schema {
	t := reflect.TypeOf(v)
	return s.api.OpenAPI().Components.Schemas.Schema(t, true, t.Name())
}

// problems documents each status with the codes behind it.
func (s *Server) problems(h *huma.Operation, codes []errs.Code) {
	slices.Sort(codes)
	schema := s.schema(v1.Problem{})
	for _, code := range slices.Compact(codes) {
		row := errs.Lookup(code)
		key := strconv.Itoa(row.HTTP)
		r := h.Responses[key]
		if r == nil {
			r = &huma.Response{Content: map[string]*huma.MediaType{problemType: {Schema: schema}}}
			h.Responses[key] = r
		} else {
			r.Description += "\n"
		}
		r.Description += fmt.Sprintf("- `%s`: %s", code, row.Hint)
		if row.Retryable {
			r.Headers = map[string]*huma.Param{"Retry-After": {
				Description: "Seconds after which a retry makes sense, where known.", Schema: &huma.Schema{Type: huma.TypeInteger},
			}}
		}
	}
}

// handle registers an operation. h's error is answered as a Problem.
func handle[I, O any](s *Server, o op, h func(context.Context, *request, *I) (*O, error)) {
	huma.Register(s.api, s.operation(o), func(ctx context.Context, in *I) (*O, error) {
		req := requestOf(ctx)
		endBodyTimeout(req, o)
		out, err := h(ctx, req, in)
		if err != nil {
			req.fault = err
			return nil, problemOf(req, err)
		}
		return out, nil
	})
}

// endBodyTimeout lifts the limit of reading the body, which would otherwise also end
// the connection, and with it the request, while the handler works.
func endBodyTimeout(req *request, o op) {
	if o.method == http.MethodPost {
		// Only a test's recorder cannot do it.
		_ = http.NewResponseController(req).SetReadDeadline(time.Time{})
	}
}

// handleStream registers an operation whose h writes the answer itself. An error that h
// returns before it wrote anything is answered as a Problem.
func handleStream[I any](s *Server, o op, h func(context.Context, *request, *http.Request, *I) error) {
	hop := s.operation(o)
	huma.Register(s.api, hop, func(ctx context.Context, in *I) (*huma.StreamResponse, error) {
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			hr, _ := humago.Unwrap(hc)
			req := requestOf(ctx)
			endBodyTimeout(req, o)
			if err := h(ctx, req, hr, in); err != nil {
				req.fault = err
				if req.status == 0 {
					writeProblem(req, problemOf(req, err))
				}
			}
		}}, nil
	})
}
