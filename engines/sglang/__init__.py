"""The microserving verbs inside an unforked SGLang, as a plugin that SGLang loads; and what starts such engines.

In SGLang's scheduler process, between its passes:

| module | what |
|---|---|
| `scheduler` | calls from the HTTP process, notes from other engines, what passes computed; wires the rest |
| `reservations`, `receiver` | room for KV on its way, who may write there, what becomes visible |
| `sender` | transfers out: chunks as they are computed |
| `transport` | NIXL: one-sided writes and notes between engines |
| `reporter` | samples of passes and transfers |
| `view` | what all of these need of SGLang |

In SGLang's HTTP process:

| module | what |
|---|---|
| `engine` | the verbs as methods; wires the rest |
| `endpoints` | routes on SGLang's own server |
| `generate`, `resume` | `start_generate` over SGLang's own endpoints |
| `sending`, `peers` | `remote_send`, and engines getting to know each other |
| `bridge`, `lifetime` | calls to the scheduler process; metrics and heartbeats |

Between them: `messages` (the two processes of one engine), `wire` (two engines), `slots` (rows of a pool), `knobs`,
`settings`. `plugin` is the entry point, and `internals` alone touches SGLang.

Starting engines: `launcher`, `server`, `model_folder`, and `cpu/` for machines without a GPU.
"""
