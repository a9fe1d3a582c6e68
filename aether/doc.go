// Package aether is DSec's data-plane protocol: many operations multiplexed over one
// byte stream. docs/aether.md is the specification; start reading at frame.go, then
// conn.go.
//
// The package owns frames, the handshake, streams with credit, cancel, deadlines,
// keep-alive and batches, on both ends. The messages carried are in aether/msg
// (generated from aether/proto by aether/protogen). It must not know what a method does, and
// must stay small enough for the guest: no reflection-based encoding, no init work.
//
// # Shape (the contract that both ends code against)
//
//	type Message interface {            // generated in aether/msg; nil-safe
//		AppendWire(b []byte) []byte     // protobuf encoding
//		ParseWire(b []byte) error       // resets m; copies what it keeps
//	}
//
//	// Kind says what a DATA frame carries.
//	const ( KindInput Kind = 0; KindStdout Kind = 1; KindStderr Kind = 2; KindPTY Kind = 3 )
//
//	// Frame is what Recv returns: raw data or one message.
//	type Frame struct { IsMessage bool; Kind Kind; Payload []byte; Last bool } // Payload valid until the next Recv on the stream
//
//	// client end
//	func NewClient(ctx, rw net.Conn, ClientConfig) (*Conn, error)   // does the handshake
//	func (c *Conn) Call(ctx, target, method string, req, resp Message) error
//	func (c *Conn) Open(ctx, target, method string, req Message) (*Stream, error)
//	func (c *Conn) Batch(ctx, *msg.Batch) (*msg.BatchResult, error)
//	func (c *Conn) Close() error; Done() <-chan struct{}; Err() error; Welcome() *msg.Welcome
//
//	func (s *Stream) Send(ctx, kind Kind, p []byte) error           // splits, waits for credit
//	func (s *Stream) SendMessage(ctx, m Message) error
//	func (s *Stream) CloseSend() error                               // FIN
//	func (s *Stream) Recv(ctx) (Frame, error)                        // io.EOF at the peer's FIN (server side) or successful END (client side)
//	func (s *Stream) Result(resp Message) error                      // client: after io.EOF, the END body
//	func (s *Stream) Cancel()                                        // client: CANCEL; the server's ctx ends
//
//	// server end: the same Stream type, plus
//	type Handler func(ctx context.Context, s *Stream) (Message, error) // ctx ends at deadline, cancel or loss of the connection
//	type Server struct { ... }; NewServer(ServerConfig{Handlers map[string]Handler | Fallback Handler, Auth, ...})
//	func (s *Server) Serve(ctx, net.Listener) error; ServeConn(ctx, net.Conn) error
//	func (s *Stream) Target() string; Method() string; Body() []byte; Parse(req Message) error; Principal() any
//	func Unary[Req, Resp](func(ctx, *Stream, *Req) (*Resp, error)) Handler
package aether
