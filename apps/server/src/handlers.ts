import type { KeyStore } from "./auth.ts";
import type { Handlers } from "./call.ts";
import type { ServerMetrics } from "./metrics.ts";
import { accountRoutes } from "./routes/account.ts";
import { nodeRoutes } from "./routes/node.ts";
import { type RouteDeps, sandboxRoutes } from "./routes/sandboxes.ts";
import { stateRoutes } from "./routes/state.ts";
import { storeRoutes } from "./routes/store.ts";
import { templateRoutes } from "./routes/templates.ts";
import { watchRoutes, type WatchState } from "./routes/watch.ts";

/** Every route of the table; a missing one does not compile. */
export function allHandlers(deps: RouteDeps & { keys: KeyStore & WatchState; metrics: ServerMetrics }): Handlers {
  return {
    ...sandboxRoutes(deps),
    ...stateRoutes(deps),
    ...templateRoutes(deps),
    ...storeRoutes(deps),
    ...accountRoutes(deps.keys),
    ...watchRoutes(deps.engine, deps.keys),
    ...nodeRoutes(deps),
  };
}
